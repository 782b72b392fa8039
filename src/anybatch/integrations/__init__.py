"""anybatch inside existing trainers; each module needs its library only when it is imported."""
