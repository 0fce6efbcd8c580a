"""`ep-a2a demo`: real text through an expert-parallel MoE layer, checked against the dense layer."""
