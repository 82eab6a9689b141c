"""Policies: guards (can a backend run the call?), rules (should it?), cost (how long does it take?), and default, their chain."""
