"""Lower bounds on the optimum: message passing, Lagrangian duals, the local polytope LP, infeasibility proofs."""
