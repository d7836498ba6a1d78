"""linattn under other people's models."""
