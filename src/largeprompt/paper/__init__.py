"""The executable paper: settings, figures, errata."""
