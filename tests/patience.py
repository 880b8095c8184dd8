"""How long tests wait for what must happen. A busy machine is late; what never comes is a fault."""

PATIENCE = 600.0  # seconds; pytest's own limit (pyproject.toml) is a little longer
