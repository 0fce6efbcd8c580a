"""What bench, trace and the doctor share: workloads, the op of a workload, clocks, pushes of plain bytes."""
