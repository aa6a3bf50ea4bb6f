// The code stands behind the '#', which browsers send to nobody. It is taken out of the address bar and the history at
// once, and posted. Where somebody is signed in already a link must not silently make them somebody else: the button waits.
const form = document.getElementById("login");
const code = location.hash.slice(1);

if (code) {
  history.replaceState(null, "", location.pathname);
  form.elements.code.value = code;
  fetch("/v1/me").then((answer) => {
    if (!answer.ok) form.requestSubmit();
  });
}
