"""The policies: guards (can a backend run the call?), rules (should it?), and the chain of both that is the default."""
