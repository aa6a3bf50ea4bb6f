// Buttons and forms that change something: they call the REST interface, and say why it refused.
(() => {
  const showProblem = (box, problem) => {
    box.replaceChildren();
    box.hidden = !problem;
    if (!problem) return;
    const place = problem.where ? `${problem.where}: ` : "";
    box.append(Object.assign(document.createElement("strong"), { textContent: place + problem.detail }));
    if (problem.remedy) box.append(Object.assign(document.createElement("p"), { textContent: problem.remedy }));
  };

  const pageOf = ({ metadata }) => `/jobs/${metadata.namespace}/${metadata.name}`;

  const call = async (method, url, body, headers = {}) => {
    try {
      const key = method === "POST" ? { "Idempotency-Key": crypto.randomUUID() } : {};
      const answer = await fetch(url, { method, body, headers: { ...headers, ...key } });
      const found = await answer.json().catch(() => ({}));
      return answer.ok ? { found } : { problem: { detail: `the service answered ${answer.status}`, ...found } };
    } catch {
      return { problem: { detail: "the service cannot be reached", remedy: "try again once it answers" } };
    }
  };

  document.addEventListener("click", async (click) => {
    const button = click.target.closest("button[data-call]");
    if (!button || (button.dataset.confirm && !confirm(button.dataset.confirm))) return;
    button.disabled = true;
    const { found, problem } = await call(button.dataset.method ?? "POST", button.dataset.call);
    button.disabled = false;
    showProblem(document.getElementById("problem"), problem);
    const next = button.dataset.next === "job" && found ? pageOf(found) : button.dataset.next;
    if (!problem && next) location.assign(next);
    else if (!problem) document.dispatchEvent(new Event("acted"));
  });

  document.addEventListener("submit", async (submit) => {
    const form = submit.target.closest("form[data-call]");
    if (!form) return;
    submit.preventDefault();
    const text = form.querySelector("textarea").value;
    const { found, problem } = await call("POST", form.dataset.call, text, { "Content-Type": "application/yaml" });
    showProblem(document.getElementById("problem"), problem);
    if (!problem) location.assign(pageOf(found));
  });
})();
