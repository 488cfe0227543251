"""What several systems share and no single one owns: promises, layouts, readers and rank-side code, one file or folder
a mechanism. A mechanism may use the core; the core knows none of them. It names no system."""
