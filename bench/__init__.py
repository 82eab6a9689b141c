"""Measurements: one script per question; raw rows under results/."""
