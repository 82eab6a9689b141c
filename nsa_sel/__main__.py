"""`python -m nsa_sel`: the command line, from a checkout without an install."""

from nsa_sel.cli.app import app

if __name__ == "__main__":
    app()
