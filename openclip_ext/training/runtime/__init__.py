"""Services of a training run: signals, heartbeats, run folder, and logs."""
