"""Programs in plain torch RPC, which those beside are compared with."""
