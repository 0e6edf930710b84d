"""The benchmark harness: `python -m bench`, described in bench/README.md."""
