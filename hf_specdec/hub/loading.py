"""stub for smoke"""
def load_drafter(*a, **k): raise RuntimeError
