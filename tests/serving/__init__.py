"""What vLLM is told, and running it; a small stand-in for vLLM is in `fake_engine.py`."""
