"""The engine: tables over the cache, in one lane; sessions and their streams."""
