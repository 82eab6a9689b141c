"""Policies: guards (can a backend run the call?), rules (should it?), cost (how long would it take?), and default,
which chains them."""
