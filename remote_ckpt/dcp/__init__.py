"""The backend for torch Distributed Checkpoint; torch starts here, nothing below imports it."""
