"""The backends: each module holds forward(...) and backward(...); specs.py tells what each can run, as data."""
