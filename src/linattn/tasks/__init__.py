"""Data for training and evaluation, one file each."""
