"""Backends: each module defines forward(...) and backward(...); specs.py declares what each can run, as data."""
