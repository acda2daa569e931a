"""Requests to tokens: scheduler, KV blocks, prefix cache, sampler, the step loop."""
