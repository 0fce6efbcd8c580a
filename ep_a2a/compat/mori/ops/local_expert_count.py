"""`mori.ops.local_expert_count`: rows per local expert."""

from ep_a2a.compat.mori.unsupported import unsupported

launch_local_expert_count = unsupported("ops.launch_local_expert_count")
