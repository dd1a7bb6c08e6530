"""Coverage-guided fuzzing of everything that parses bytes from a store."""
