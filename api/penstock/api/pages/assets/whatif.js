// Requests a new plan whenever a control changes: the newest request counts, the one before is canceled.
(() => {
  const form = document.getElementById("whatif");
  const answer = document.getElementById("answer");
  const base = JSON.parse(document.getElementById("base").textContent);
  const POLL_MILLISECONDS = 300;
  let number = 0, asked = null;

  const question = () => {
    const wanted = structuredClone(base);
    for (const select of form.querySelectorAll("select")) {
      const value = Number.isNaN(Number(select.value)) ? select.value : Number(select.value);
      for (const path of select.dataset.paths.split(" ")) {
        const names = path.split(".");
        names.slice(0, -1).reduce((at, name) => at[name], wanted)[names.at(-1)] = value;
      }
    }
    for (const box of form.querySelectorAll("input[type=checkbox]:checked")) wanted[box.name] = true;
    return JSON.stringify(wanted);
  };

  const showProblem = (problem) => {
    const box = document.getElementById("problem");
    box.hidden = !problem;
    box.textContent = problem ? [problem.where, problem.detail, problem.remedy].filter(Boolean).join(": ") : "";
  };

  const show = async (id) => {
    const page = await (await fetch(`/plans/${id}`, { headers: { Accept: "text/html" } })).text();
    const main = new DOMParser().parseFromString(page, "text/html").getElementById("main");
    main.querySelector(".head").remove();
    answer.replaceChildren(...main.childNodes);
  };

  const plan = async () => {
    const mine = ++number;
    if (asked) fetch(`/v1/plans/${asked}`, { method: "DELETE" });
    asked = null;
    answer.classList.add("waiting");
    try {
      const headers = { "Content-Type": "application/json", "Idempotency-Key": crypto.randomUUID() };
      const made = await fetch("/v1/plans", { method: "POST", body: question(), headers });
      const found = await made.json();
      showProblem(made.ok ? null : found);
      if (!made.ok) return;
      if (mine !== number) { fetch(`/v1/plans/${found.id}`, { method: "DELETE" }); return; }
      const id = found.id;
      asked = id;
      for (let state = found.state; ; ) {
        await show(id);
        if (!["Queued", "Working"].includes(state) || mine !== number) break;
        await new Promise((resolve) => setTimeout(resolve, POLL_MILLISECONDS));
        if (mine !== number) return;
        state = (await (await fetch(`/v1/plans/${id}`)).json()).state;
        if (mine !== number) return;
      }
    } catch {
      showProblem({ detail: "the service cannot be reached", remedy: "move a control to try again" });
    } finally {
      if (mine === number) { asked = null; answer.classList.remove("waiting"); }
    }
  };

  form.addEventListener("change", plan);
  plan();
})();
