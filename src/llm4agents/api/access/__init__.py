"""Who may do what: the outermost layer of the server. `gate.guarded` wraps the application once for each listener."""
