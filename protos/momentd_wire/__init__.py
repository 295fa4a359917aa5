"""The contract between momentd's client and daemon: messages, errors, limits, array codec."""
