"""Evaluations: mixers trained on tasks, recall, concentration, perplexity, reports."""
