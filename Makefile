# Aliases of ./dev, which does the work.
VERBS := setup demo test check bench clean
.PHONY: $(VERBS)
$(VERBS):
	@./dev $@
