"""The daemon: holds tables of optimizer state, and serves them to training processes."""
