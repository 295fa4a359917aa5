"""Where rows live: the space in RAM, segments on disk, the catalog that says what exists."""
