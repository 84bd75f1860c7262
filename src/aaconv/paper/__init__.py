"""Our numbers beside the paper's: its tables cell by cell, and its figures."""
