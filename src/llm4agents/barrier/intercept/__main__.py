"""Started by `barrier.boot`, in the environment of `environment`."""

from llm4agents.barrier.intercept.process import main

main()
