"""Pure functions between rewards and gradients: advantage, objective, correction, filters, shaping."""
