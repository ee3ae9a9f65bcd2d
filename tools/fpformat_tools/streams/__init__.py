"""What passes between formats: a state whose bytes stay where they are until they are written."""
