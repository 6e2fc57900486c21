"""The scheduler's side: what is found, what is loaded and stored, and who waits for what.

All of it runs on vLLM's scheduler thread, answers from memory, and knows no classes of vLLM's.

- `manager.py`: answers vLLM's questions from the chain, and takes the workers' reports
- `request_state.py`: what is known of each request; `pending_errands.py`: what workers were asked
- `waiting_requests.py`: who waits for the engine's time
- `waiting_prefetches.py`: what is brought into host memory for those that wait
- `hint_actions.py`: what may be said about the use of blocks; `hints.py`: does it
- `admission_waits.py`: requests that wait for room in host memory
- `load_deadlines.py`: which load is not worth waiting for any longer
- `prefill_handoff.py`: prompts that another engine has computed
- `prefill_pace.py`: how fast the engine computes prompts
- `block_events.py`: events that say what is in blocks; `metrics.py`: counters, gauges, histograms
"""
