"""Steps whose micro-batches have unequal numbers of tokens: how samples are cut, the orders, and the times of steps."""
