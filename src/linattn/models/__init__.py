"""Models built of the layers."""
