"""What the daemon says about itself: log lines, latency, rates, memory."""
