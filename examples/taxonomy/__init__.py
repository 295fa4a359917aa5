"""Learns the NCBI taxonomy as an embedding whose optimizer state does not fit the cache."""
