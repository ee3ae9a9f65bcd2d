"""From a request to a report: detect, read, select, write."""
