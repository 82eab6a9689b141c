"""Plugins of serving engines: vLLM and SGLang load `register` of the modules here by an entry point. Nothing here is
imported by the rest of the package."""
