"""The built-in templates, a module each: data, no I/O. By name they are in `images.spec.BUILTIN`."""
