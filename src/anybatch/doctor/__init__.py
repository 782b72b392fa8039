"""Why a model does not learn: what reaches its parameters, and what does not."""
