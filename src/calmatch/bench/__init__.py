"""The paper as suites of runs, with its tables, statistics and figures."""
