"""`ep-a2a demo`: a text through an expert-parallel MoE layer, checked against the dense layer."""
