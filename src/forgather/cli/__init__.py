"""The program `forgather`: thin over the library, and quick to answer because it imports only what a command needs."""
