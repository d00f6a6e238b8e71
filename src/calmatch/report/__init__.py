"""Tables for the console, pictures, and the report page, from run folders alone."""
