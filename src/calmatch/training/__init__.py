"""Training: from a Config to a finished run folder."""
