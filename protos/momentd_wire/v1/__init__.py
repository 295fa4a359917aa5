"""Generated code of protocol version 1. Made by `make protos`; never edited."""
