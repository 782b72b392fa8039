"""anybatch inside the trainers that people already use; each module needs its own library, and only when imported."""
