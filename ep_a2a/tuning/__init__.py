"""Launch numbers: the policy that computes them, and the tuned tables that replace them."""

from ep_a2a.moved import moved_names

MOVED_TO_TABLES = """
    ABOUT Evidence Found INTRA_NODE MAX_RATIO NO_TABLES PHASES ShapeKey Table TableEntry TunedLaunch TunedTables
    arch_name load_tables lookup read_table shape_key shipped_directory table_name write_table"""
"""Names of the module `ep_a2a.tuning` of version 0.1."""

__getattr__ = moved_names(__name__, "ep_a2a.tuning.tables", MOVED_TO_TABLES)
