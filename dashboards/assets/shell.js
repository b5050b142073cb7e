// Theme of the page and of every plot in it. A choice is kept in the browser; until there is one the page
// follows the system. Colors come from dashboards/theme.py.
window.overlapscope = (() => {
  const colors = JSON.parse(document.getElementById("colors").textContent)
  const system = window.matchMedia("(prefers-color-scheme: dark)")
  const known = (name) => (name === "light" || name === "dark" ? name : null)

  function chosen() {
    const inAddress = known(new URLSearchParams(location.search).get("theme"))
    try {
      return inAddress ?? known(localStorage.getItem("overlapscope-theme"))
    } catch {
      return inAddress
    }
  }

  const current = () => chosen() ?? (system.matches ? "dark" : "light")

  // Models carry a tag {paint: {property: role}}, set by dashboards.theme.paint.
  function paintPlots() {
    for (const doc of window.Bokeh?.documents ?? []) {
      for (const model of doc._all_models.values()) {
        for (const tag of model.tags) {
          if (!tag.paint) continue
          const roles = Object.entries(tag.paint)
          const painted = Object.fromEntries(roles.map(([property, role]) => [property, colors[document.documentElement.dataset.theme][role]]))
          // The theme is local to this browser: the server is not notified.
          model.setv(painted, {sync: false})
        }
      }
    }
  }

  function apply() {
    document.documentElement.dataset.theme = current()
    paintPlots()
  }

  // Chromium prints only the last strokes of what was drawn since printing began: as one image it is whole.
  function makeImage(canvas) {
    if (!canvas.width || !canvas.height) return
    const context = canvas.getContext("2d")
    context.save()
    context.resetTransform()
    context.globalCompositeOperation = "copy"
    context.drawImage(canvas, 0, 0)
    context.restore()
  }

  // Plots can't be laid out anew for paper: the page keeps its width, and is scaled down. Paper is light.
  const SHEET_PX = 718 // width of A4, upright, between usual margins
  window.addEventListener("beforeprint", async () => {
    const {clientWidth, dataset, style} = document.documentElement
    style.setProperty("--printed-width", `${clientWidth}px`)
    style.setProperty("--printed-zoom", Math.min(1, SHEET_PX / clientWidth))
    if (dataset.theme === "light") return
    dataset.theme = "light"
    paintPlots()
    // Plots pass colors on from promise to promise; paper waits for these, and for no frame.
    for (let turn = 0; turn < 1000; turn++) await null
    for (const view of window.Bokeh?.index.roots ?? []) {
      if (!view.canvas_view) continue
      view.request_paint()
      view.paint()
      for (const layer of [view.canvas_view.primary, view.canvas_view.overlays]) makeImage(layer.canvas)
    }
  })
  window.addEventListener("afterprint", apply)

  // A list of values is that many entries of one name. isNew: adds an entry to the history, so that going back undoes it.
  function setAddress(entries, {isNew = false} = {}) {
    const query = new URLSearchParams(location.search)
    for (const [name, value] of Object.entries(entries)) {
      if (value == null || Array.isArray(value)) query.delete(name)
      else query.set(name, value)
      if (Array.isArray(value)) for (const each of value) query.append(name, each)
    }
    const address = location.pathname + (String(query) && `?${query}`)
    if (isNew) history.pushState(null, "", address)
    else history.replaceState(null, "", address)
  }

  function toggleTheme() {
    const next = current() === "dark" ? "light" : "dark"
    try {
      localStorage.setItem("overlapscope-theme", next)
    } catch {
      // Private windows may refuse to store; the address keeps the choice.
    }
    setAddress({theme: next})
    apply()
  }

  // Each page opens as it was left: the links in the header lead to the last view in this tab.
  const placeOf = (url) => `overlapscope-place ${url.pathname}`

  function keepPlace() {
    const here = new URL(location.href)
    const key = placeOf(here)
    here.searchParams.delete("theme")
    try {
      sessionStorage.setItem(key, here.search)
    } catch {
      // Private windows may refuse to store; then a page opens with its initial view.
    }
  }

  function leadToPlaces() {
    const here = new URLSearchParams(location.search)
    for (const link of document.querySelectorAll("header nav a:not([aria-current], [href*='?'])")) {
      try {
        const place = new URLSearchParams(sessionStorage.getItem(placeOf(new URL(link.href))) ?? "")
        // How much of a recording is loaded is one choice for all pages.
        if (here.has("read")) place.set("read", here.get("read"))
        else place.delete("read")
        link.search = place
      } catch {
        return
      }
    }
  }

  // Reloads this page, with the view in its address, as soon as the server responds. Until then a note is shown.
  async function reload() {
    try {
      // Any response will do, except that of a proxy that has also lost the server.
      const {status} = await fetch(document.body.dataset.news, {cache: "no-store", redirect: "manual"})
      if (status < 500) return window.overlapscope.reloadInPlace()
    } catch {
      // No response.
    }
    document.getElementById("lost").hidden = false
    setTimeout(reload, 1500)
  }

  let isLost = false
  function reconnect() {
    if (isLost) return
    isLost = true
    document.getElementById("lost").hidden = false
    reload()
  }

  // Long tables show only their first rows; a button below shows the rest.
  function unfold({target}) {
    const button = target.closest?.("[data-unfold]")
    if (!button) return
    button.parentElement.querySelector("tbody[hidden]").hidden = false
    button.parentElement.dataset.unfolded = ""
    button.hidden = true
  }

  // Actions by key on the page, or on a part of it that has the focus, for when nothing is being typed.
  function onKeys(acts, area = document) {
    area.addEventListener("keydown", (event) => {
      const isTyping = event.target.closest?.("textarea, select, dialog, input:not([type=radio], [type=checkbox])")
      const act = acts[event.key.length === 1 ? event.key.toLowerCase() : event.key]
      if (isTyping || !act || event.ctrlKey || event.metaKey || event.altKey) return
      event.preventDefault()
      act(event)
    })
  }

  // Copies text; where the page may not do that, as without encryption, the text of an element is selected and copied.
  // Returns whether it could.
  async function copy(text, element) {
    try {
      await navigator.clipboard.writeText(text)
      return true
    } catch {
      getSelection().selectAllChildren(element)
      return document.execCommand("copy")
    }
  }

  function openTimeline(entries) {
    const address = new URL(document.body.dataset.timeline, location.href)
    const theme = new URLSearchParams(location.search).get("theme")
    for (const [name, value] of Object.entries({...entries, ...(theme && {theme})})) address.searchParams.set(name, value)
    location.assign(address)
  }

  // Calls a function when a property of a Bokeh model changes.
  const on = (model, property, act) => model.property(property).change.connect(act)

  // What scrolls sideways in this window can be reached and scrolled by keys.
  function letKeysScroll() {
    for (const box of document.querySelectorAll(".panel:not([tabindex='-1']), .panel table, .document :is(pre, table)")) {
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0
      else box.removeAttribute("tabindex")
    }
  }

  system.addEventListener("change", apply)
  window.addEventListener("resize", letKeysScroll)
  document.addEventListener("click", unfold)
  window.addEventListener("pagehide", keepPlace)
  document.documentElement.dataset.theme = current()
  document.addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme")?.addEventListener("click", toggleTheme)
    leadToPlaces()
    letKeysScroll()
    const nav = document.querySelector("header nav")
    const tab = nav?.querySelector("[aria-current]")
    if (tab) nav.scrollLeft = tab.offsetLeft - (nav.clientWidth - tab.offsetWidth) / 2
  })
  return {paintPlots, setAddress, onKeys, on, copy, openTimeline, reload, reconnect}
})()
